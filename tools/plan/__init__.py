"""Capacity planning: the engine's own core and scheduler, over steps whose time is computed.

    cost       what a step takes: fitted to measured steps, or a roofline of ceilings
    link       measures what ranks take to tell each other something
    ranks      what each rank has and says, of a model on several devices known by their ceilings
    calibrate  measures the steps of a real model on this machine, and fits them
    traffic    when requests come, and how long they are
    simulate   runs the traffic through an engine whose runner only lets time pass
    answer     percentiles, the most that one replica takes, how many are needed
    search     which way to share a model out needs fewest devices

No part of the scheduler is written again: what is planned is what would be done.
"""
