import json
import logging

from cluster.log_format import stderr_handler


def record(**extra: object) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"name": "cluster.group", "levelname": "WARNING", "msg": "lost %d\nranks", "args": (2,), **extra}
    )


def test_text_is_a_level_a_time_and_a_message() -> None:
    line = stderr_handler("text").format(record())
    assert line.startswith("WARNING ")
    assert line.endswith(" -- lost 2\nranks")


def test_json_is_one_line_with_the_fields_of_ray() -> None:
    line = stderr_handler("json").format(record(request_id="mine"))
    assert "\n" not in line
    fields = json.loads(line)
    expected = {"levelname": "WARNING", "message": "lost 2\nranks", "request_id": "mine"}
    assert expected.items() <= fields.items()
