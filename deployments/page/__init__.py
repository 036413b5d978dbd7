"""What does a browser see? `page` serves static files at `/`; `demo` adds `/demo/kill`, which kills a process."""
