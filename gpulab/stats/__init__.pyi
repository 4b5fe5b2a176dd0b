from .verdicts import Verdict as Verdict
from .verdicts import verdict as verdict
