"""The op rules: which ops may run in low precision, and why.

The rules themselves are data (`rules/*.toml` at the top of the repository); this
package reads the files, lays the user's rules over the built-in ones, and looks ops up.
Families of ops (`family("noise")`), which no set of rules changes, are data too.
"""

from autoamp.passes.rules.model import Category, Condition, Rule, family, is_default
from autoamp.passes.rules.table import Rules, autocast_rules

__all__ = [
    "Category",
    "Condition",
    "Rule",
    "Rules",
    "autocast_rules",
    "family",
    "is_default",
]
