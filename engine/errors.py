"""Every exception of the project, in one tree.

```
PacelineError                  base; never raised itself
  RequestError          400    the caller's fault; `param` names the field
    PromptTooLongError
    UnknownModelError   404
  CapacityError         503    try again later
    QueueFullError      429
  ConfigError           start  a setting that does not exist, or a value that does not fit
  ModelError            start  this model cannot be served; the message says why
    ModelMismatchError         draft and target cannot work together
  DrafterError          inner  a drafter failure; becomes an empty draft, never reaches a client
  TargetError           503    the target workers died or missed a deadline
```

Each carries one message string, so it pickles across processes: what was wrong, the value and the limit.
"""


class PacelineError(Exception):
    """Base of every error this project raises on purpose."""


class RequestError(PacelineError):
    """A request that cannot be served as it was sent; nothing was changed by it."""

    param: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.param = param

    def __str__(self) -> str:
        return str(self.args[0])


class PromptTooLongError(RequestError):
    """The prompt, or the prompt and the tokens asked for, exceed the context length."""


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""


class CapacityError(PacelineError):
    """The server cannot take the request now; the same request may succeed later."""


class QueueFullError(CapacityError):
    """The waiting queue is at its limit."""


class ConfigError(PacelineError):
    """A setting that does not exist, or a value outside its bounds."""


class ModelError(PacelineError):
    """A model directory or architecture that cannot be served."""


class ModelMismatchError(ModelError):
    """A draft and a target that do not share one token id space."""


class DrafterError(PacelineError):
    """The drafter is gone, late or confused; costs time, never correctness."""


class TargetError(PacelineError):
    """The target did not finish a round; committed tokens are untouched."""
