"""The systems that `tests/bench/compare` measures side by side, and what it needs to do so.

    install   gets each system with its own package manager, once, into a cache directory
    servers   starts the database under a system: fresh data, a free port of loopback, gone at the end
    processes talks to the processes of a system, one JSON object a line
    ordinary  the rows of `compare --ordinary`
    systems   what is known about each system: versions, durability, settings, how to run it
    report    the tables and the ratios
"""
