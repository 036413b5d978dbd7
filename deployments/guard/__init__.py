"""May a request enter? `middleware` checks headers, keys and sizes, `admission` full queues, `body` the JSON."""
