"""The checker that jaxtyping applies to both packages while tests run.

A plain beartype refuses an int where a float is annotated; PEP 484 accepts one, and so does this.
"""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
