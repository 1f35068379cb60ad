"""Several API processes behind one port, in front of one engine (``--api-workers``).

                      ┌── spawns, restarts ──►  API worker ──┐
    supervisor ───────┼── spawns, restarts ──►  API worker ──┤  Unix socket
    (quire serve)     └── spawns, restarts ──►  engine ◄─────┘  requests, tokens

The supervisor serves no requests. It holds the listening sockets, one per worker (the kernel
distributes connections over them by SO_REUSEPORT, and queues those that arrive while a worker is
replaced), and the socket on which the engine accepts the workers. A worker that dies loses only its
own connections. If the engine dies, all workers' streams continue in the next one.

End-of-file on a worker's socket pair tells the supervisor that the worker is dead. Conversely, it
tells the worker that the supervisor is dead; the worker then exits at once, and so does the engine.
SIGTERM goes to the supervisor, which passes it to all workers: they drain, and the engine ends
after the last one.
"""
