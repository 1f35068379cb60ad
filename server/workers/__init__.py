"""Several API processes behind one port, in front of one engine (``--api-workers``).

                      ┌── spawns, restarts ──►  API worker ──┐
    supervisor ───────┼── spawns, restarts ──►  API worker ──┤  Unix socket
    (quire serve)     └── spawns, restarts ──►  engine ◄─────┘  requests, tokens

The supervisor serves nobody: it holds the listening sockets, one a worker (the kernel spreads
connections over them by SO_REUSEPORT, and keeps those that come while a worker is replaced), and
the socket at which the engine takes the workers. A worker that dies takes its own connections
along and nobody else's; when the engine dies, every worker's streams go on in the next one. End-of-
file on a worker's socket pair is its death notice, and the supervisor's to the worker, which then
ends at once; so does the engine. SIGTERM goes to the supervisor, and through it to all workers:
they drain, and the engine ends after the last.
"""
