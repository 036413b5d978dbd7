"""Every kind of trained head by its name in `HeadConfig.kind`.

To add a kind, write its file with a subclass of `Head`, and give it a line here.
"""

from collections.abc import Mapping

from engine.models.heads.dflash import DFlashHead, DSparkHead
from engine.models.heads.eagle3 import Eagle3Head
from engine.models.heads.head import Head
from engine.models.heads.peagle import PEagleHead

HEADS: Mapping[str, type[Head]] = {
    "eagle3": Eagle3Head,
    "peagle": PEagleHead,
    "dflash": DFlashHead,
    "dspark": DSparkHead,
}
