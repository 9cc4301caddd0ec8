"""``python -m gradwire.cli`` is the command ``gradwire``."""

from gradwire.cli import main

if __name__ == "__main__":
    main()
