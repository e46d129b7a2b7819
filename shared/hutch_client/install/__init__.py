"""Installing hutchd as a service of systemd or launchd: a pure plan, and one small executor that carries it out."""
