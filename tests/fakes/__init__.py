"""What stands in for models, drafters, servers and time in every room's tests."""

from tests.fakes.clock import Clock, erratic_clock
from tests.fakes.drafters import (
    ConstantDrafter,
    CuttingDrafter,
    ForgetfulDrafter,
    InterruptedDrafter,
    LosableDrafter,
    TreeDrafter,
    WrappedDrafter,
    run_ahead,
)
from tests.fakes.laws import (
    FOREIGN,
    ContextModel,
    LateModel,
    LawBackend,
    MarkovModel,
    SelfDraftingModel,
    ThinnedModel,
    byte_tokenizer,
    sharpen,
)
from tests.fakes.streams import data_of, events_of

__all__ = [
    "FOREIGN",
    "Clock",
    "ConstantDrafter",
    "ContextModel",
    "CuttingDrafter",
    "ForgetfulDrafter",
    "InterruptedDrafter",
    "LateModel",
    "LawBackend",
    "LosableDrafter",
    "MarkovModel",
    "SelfDraftingModel",
    "ThinnedModel",
    "TreeDrafter",
    "WrappedDrafter",
    "byte_tokenizer",
    "data_of",
    "erratic_clock",
    "events_of",
    "run_ahead",
    "sharpen",
]
