"""Every kind of trained head by its name in `HeadConfig.kind`.

To add a kind, write its file with a subclass of `Head`, and give it a line here.
"""

from collections.abc import Mapping

from engine.heads.eagle3 import Eagle3Head
from engine.heads.head import Head

HEADS: Mapping[str, type[Head]] = {"eagle3": Eagle3Head}
