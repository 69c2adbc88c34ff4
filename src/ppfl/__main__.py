"""python -m ppfl"""

from .cli import main

main()
