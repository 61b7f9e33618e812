"""Other people's ways of decoding, faithfully, to be compared with."""

from ldjax.contrib._medusa2 import as_medusa2, typical_accept
from ldjax.contrib._tuned import as_tuned_medusa2

__all__ = ["as_medusa2", "as_tuned_medusa2", "typical_accept"]
