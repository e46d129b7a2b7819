# bash reads this before a command of an agent that has no sandbox: it gives the command the runtime directory of its
# account, which the CLI itself must not have (see `launch`).
export XDG_RUNTIME_DIR="$HUTCH_AGENT_RUNTIME_DIR"
unset BASH_ENV HUTCH_AGENT_RUNTIME_DIR
