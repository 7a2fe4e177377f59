"""Key smoothing of a model: offsets and gains of each layer, measured on pseudo-random tokens."""

from kvloom.integrations.transformers.smoothing.asked import smoothing_for, smoothing_report
from kvloom.integrations.transformers.smoothing.calibration import smoothing_of
from kvloom.integrations.transformers.smoothing.fitting import LayerSmoothing

__all__ = ["LayerSmoothing", "smoothing_for", "smoothing_of", "smoothing_report"]
