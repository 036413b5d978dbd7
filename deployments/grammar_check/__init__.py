"""Compiles a client's grammar in a process that can be stopped: compiler, checker, process."""
