"""hutch-launcher: the one privileged part of Hutch. Standard library only; it imports no other package of Hutch."""
