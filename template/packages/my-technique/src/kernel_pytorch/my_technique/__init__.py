"""My technique, differentiable, at every level that this package has."""

from .functional import my_technique
from .module import MyTechnique

__all__ = ["MyTechnique", "my_technique"]
