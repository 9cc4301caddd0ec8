"""``python -m gradwire_server`` is the command ``gradwire-server``."""

from gradwire_server.daemon.cli import main

if __name__ == "__main__":
    main()
