"""``python -m gpupoold``."""

from gpupoold.service import main

if __name__ == "__main__":
    main()
