"""Compare each kernel with the limits of its machine, and with torch's own.

    python -m kernels.bench [--output FOLDER] [--only WORD]

A case is checked against its peers before it is timed. Times are medians over replays of a CUDA
graph, on data several times the size of the L2 cache; the limits are measured in the same run.
"""
