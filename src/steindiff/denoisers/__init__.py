"""Denoisers: anything that turns (x, level) into E[x* | x]."""

from steindiff.denoisers.base import CountingDenoiser as CountingDenoiser
from steindiff.denoisers.base import Denoiser as Denoiser
from steindiff.denoisers.exact import Gaussian as Gaussian
from steindiff.denoisers.prediction import X0 as X0
from steindiff.denoisers.prediction import EDMDenoiser as EDMDenoiser
from steindiff.denoisers.prediction import Epsilon as Epsilon
from steindiff.denoisers.prediction import FlowVelocity as FlowVelocity
from steindiff.denoisers.prediction import Preconditioned as Preconditioned
from steindiff.denoisers.prediction import Prediction as Prediction
from steindiff.denoisers.prediction import Score as Score
from steindiff.denoisers.prediction import Velocity as Velocity
from steindiff.denoisers.wrappers import Autocast as Autocast
from steindiff.denoisers.wrappers import DynamicThreshold as DynamicThreshold
from steindiff.denoisers.wrappers import Guided as Guided
from steindiff.denoisers.wrappers import StaticThreshold as StaticThreshold
