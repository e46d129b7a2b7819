"""The sockets of hutchd: who may call what, and where each call goes."""
