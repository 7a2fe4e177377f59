"""Nothing here is collected where transformers has no continuous batching that this library serves."""

from __future__ import annotations

import transformers
from packaging.version import Version

from kvloom.integrations.transformers.session import OLDEST

collect_ignore_glob = [] if Version(transformers.__version__) >= Version(OLDEST) else ["test_*.py"]
