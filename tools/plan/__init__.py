"""Capacity planning: the engine's own core and scheduler, with computed step times.

    cost       the time of a step: fitted to measured steps, or a roofline of ceilings
    link       measures the communication between ranks
    ranks      the shares and communication of the ranks of a model, on devices known by ceilings
    calibrate  measures the steps of a real model on this machine, and fits them
    traffic    arrival times and lengths of requests
    simulate   runs the traffic through an engine whose runner only advances the clock
    predict    percentiles, the maximum rate of one replica, how many replicas are needed
    search     the parallel layout that needs the fewest devices

No part of the scheduler is reimplemented, so plans match what the engine does.
"""
