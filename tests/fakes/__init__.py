"""What stands in for models, drafters, servers and time in every room's tests."""

from tests.fakes.clock import Clock
from tests.fakes.drafters import (
    ConstantDrafter,
    CuttingDrafter,
    ForgetfulDrafter,
    InterruptedDrafter,
    TreeDrafter,
    WrappedDrafter,
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
    "MarkovModel",
    "SelfDraftingModel",
    "ThinnedModel",
    "TreeDrafter",
    "WrappedDrafter",
    "byte_tokenizer",
    "data_of",
    "events_of",
    "sharpen",
]
