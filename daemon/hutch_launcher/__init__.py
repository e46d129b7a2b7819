"""hutch-launcher: the one privileged part of Hutch. Standard library only; it imports nothing of ours."""
