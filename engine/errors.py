"""Every exception of the project, in one tree.

```
PacelineError                  base; never raised itself
  RequestError          400    the request is invalid; `param` names the field
    PromptTooLongError
    UnknownModelError   404
  CapacityError         503    try again later
    QueueFullError      429
  ConfigError           start  a setting that does not exist, or a value that does not fit
  ModelError            start  this model cannot be served; the message says why
    ModelMismatchError         draft and target cannot work together
  TargetError           503    the target workers died or missed a deadline
  DrafterError                 a drafter proposed an invalid draft: an error in the drafter
```

Messages name the fault, the value and the limit.
"""


class PacelineError(Exception):
    """Base of every error that this project raises deliberately."""


class RequestError(PacelineError):
    """The request is invalid; it had no effect."""

    param: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.param = param

    def __str__(self) -> str:
        return str(self.args[0])


class PromptTooLongError(RequestError):
    """The prompt and the requested tokens exceed the context length or the KV cache."""


class UnknownModelError(RequestError):
    """The request names a model that is not served."""


class CapacityError(PacelineError):
    """The server cannot take the request now; a later try may succeed."""

    retry_after_s: int = 1


class QueueFullError(CapacityError):
    """The queue is full."""


class ConfigError(PacelineError):
    """A setting is unknown, or its value out of bounds."""


class ModelError(PacelineError):
    """The model directory or architecture cannot be served."""


class ModelMismatchError(ModelError):
    """Draft and target do not share their token ids."""


class TargetError(PacelineError):
    """The target failed to finish a round; committed tokens are unchanged."""


class DrafterError(PacelineError):
    """A drafter proposed an invalid draft; committed tokens are unchanged."""
