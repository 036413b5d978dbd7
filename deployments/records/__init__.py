"""How is an answer kept, and audited?

- `record`: a request and its answer, all that an audit needs; how it is made.
- `record_log`: the files to which an Ingress writes records.
- `record_lines`: records from files, and from other logs of requests and answers.
- `record_reader`: what an audit asks of the engine, and its result.
"""
