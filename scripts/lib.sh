# What the scripts here share; sourced, never run. Sets `top`, and `python` to that of the virtual environment.
set -euo pipefail
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$top"
venv=${HUTCH_VENV:-$top/.venv}
python=$venv/bin/python
# Without .pyc files each worker of pytest compiles all tests again.
unset PYTHONDONTWRITEBYTECODE

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }

works() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# find_python [NAME...]: the first of these, else the plain python3 or another, that is new enough and has venv.
find_python() {
  local name
  for name in "$@" python3 python3.13 python3.12 python3.11; do
    if works "$name"; then
      command -v "$name"
      return
    fi
  done
  say "needs Python 3.11 or newer with venv (on Debian: apt-get install python3-venv)"
  exit 1
}

# newest_python: the newest one of this machine, also among those that pyenv keeps.
newest_python() {
  local name
  for name in python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13.*/bin/python3.13 python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python3.12; do
    if works "$name"; then
      command -v "$name"
      return
    fi
  done
  find_python
}

# oldest_python: the oldest one that Hutch supports and this machine has.
oldest_python() {
  local name
  for name in python3.11 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python3.11 python3.12; do
    if works "$name"; then
      command -v "$name"
      return
    fi
  done
  find_python
}

# use_python PROGRAM: from here on `python` is of a virtual environment of that interpreter; .venv if it is of that version.
use_python() {
  local version='import sys; print(sys.version_info[:2])'
  if [[ -x $venv/bin/python && $("$venv/bin/python" -c "$version") == $("$1" -c "$version") ]]; then return; fi
  export HUTCH_PYTHON=$1
  venv=$top/.venv-$(basename "$1")
  python=$venv/bin/python
}

# ready GROUP...: a virtual environment with Hutch and these dependency groups. Does nothing when it is up to date.
ready() {
  local group groups=() marks=("$venv/.hutch") mark old=0
  for group in "$@"; do
    groups+=(--group "$group")
    marks+=("$venv/.hutch-$group")
  done
  for mark in "${marks[@]}"; do
    if [[ ! -f $mark || pyproject.toml -nt $mark ]]; then old=1; fi
  done
  if [[ -x $python ]] && ((!old)); then return; fi
  if [[ ! -x $python ]]; then
    say "making $venv"
    "${HUTCH_PYTHON:-$(find_python)}" -m venv "$venv"
    "$python" -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
  fi
  say "installing hutch${*:+ and what $* needs} (the first time this takes a minute)"
  "$python" -m pip install --quiet --disable-pip-version-check -e . "${groups[@]}"
  touch "${marks[@]}"
}
