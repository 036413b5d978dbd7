"""Compiles a stranger's grammar in a process that can be stopped: checker, process."""
