"""python -m ppfl"""

from .cli import main

if __name__ == "__main__":
    main()
