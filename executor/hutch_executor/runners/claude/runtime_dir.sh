# For CLIs that executors of an earlier version started, which name this file in BASH_ENV (now: shell/). bash reads it
# before a command: it gives the command the runtime directory of its account, which the CLI itself must not have.
export XDG_RUNTIME_DIR="$HUTCH_AGENT_RUNTIME_DIR"
unset BASH_ENV HUTCH_AGENT_RUNTIME_DIR
