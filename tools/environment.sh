# Sourced by the tools: makes the virtual environment that they run in.
#
# `prepare_environment demo|test|dev` leaves PYTHON set to an interpreter that has Stitch (editable)
# and, for `dev`, everything that tests and checks need (for `test`: all but PyTorch). It installs only when something is missing: a
# marker file in the environment remembers what was installed, from which pyproject.toml, and where.
# Needs Python 3.11 to 3.13 with venv; the first run needs a package index (pip's own settings,
# such as PIP_INDEX_URL, hold). STITCH_VENV names another place than .venv.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="${STITCH_VENV:-$ROOT/.venv}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
# A link is a link however it is spelled.
while :; do
  case "$VENV" in */) VENV="${VENV%/}" ;; */.) VENV="${VENV%/.}" ;; *) break ;; esac
done
PYTHON="$VENV/bin/python"
MARKER="$VENV/.stitch-installed"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONNOUSERSITE=1
# Compiled modules are kept: without them each process that loads Stitch takes half a second longer.
unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE

fail() {
  printf '%s: %s\n' "$(basename "$0")" "$1" >&2
  shift
  printf '  %s\n' "$@" >&2
  exit 1
}

# `check NAME COMMAND...` runs a command and notes whether it failed; `report_checks` names those
# that did, and returns 1 if there is one.
failed_checks=()
check() {
  local name="$1"
  shift
  printf '\n== %s\n' "$name"
  "$@" || failed_checks+=("$name")
}

report_checks() {
  if [ "${#failed_checks[@]}" -gt 0 ]; then
    printf '\nfailed: %s\n' "$(IFS=,; echo "${failed_checks[*]}")"
    return 1
  fi
  printf '\nall checks passed\n'
}

say() { printf '%s\n' "$*" >&2; }

# "3.12" of an interpreter that Stitch supports and that can make environments; fails for others.
minor_of() {
  "$1" - 2>/dev/null <<'CODE'
import sys, venv, ensurepip
sys.exit(not (3, 11) <= sys.version_info < (3, 14) or print("%d.%d" % sys.version_info[:2]))
CODE
}

find_python() {
  local candidate found
  for candidate in "${STITCH_PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
    [ -n "$candidate" ] && found="$(command -v "$candidate")" || continue
    minor_of "$found" >/dev/null && printf '%s' "$found" && return 0
  done
  return 1
}

# Interpreters, a line each: those named, else those on the path and those that pyenv keeps.
other_pythons() {
  if [ -n "${STITCH_PYTHONS:-}" ]; then
    printf '%s\n' $STITCH_PYTHONS
    return
  fi
  local name
  for name in python3.11 python3.12 python3.13 python3; do command -v "$name"; done
  command -v pyenv >/dev/null && printf '%s\n' "$(pyenv root)"/versions/3.1[123].*/bin/python3
  return 0
}

# What an installation depends on: where the repository is, its pyproject.toml, the interpreter.
fingerprint() {
  printf '%s %s ' "$ROOT" "$(cksum <"$ROOT/pyproject.toml" | tr ' ' '-')"
  "$PYTHON" -c 'import sys; print(sys.version.split()[0])' 2>/dev/null
}

is_installed() {
  [ -x "$PYTHON" ] && [ -r "$MARKER" ] || return 1
  local have print
  print="$(fingerprint)"
  while read -r have; do
    # An environment for development does for the demo as well.
    [ "$have" = "$1 $print" ] || [ "$have" = "dev $print" ] && return 0
  done <"$MARKER"
  return 1
}

create_environment() {
  local base
  base="$(find_python)" || fail "Python 3.11, 3.12 or 3.13 with its venv module is needed" \
    "try: apt-get install python3 python3-venv" \
    "or name an interpreter: STITCH_PYTHON=/path/to/python3.12 $0"
  say "making $VENV with $("$base" --version 2>&1)"
  "$base" -m venv --clear "$VENV" || fail "could not make the environment $VENV"
}

# Dependency groups of pyproject.toml need pip 25.1; ensurepip of older Pythons brings an older one.
has_groups() { [[ "$("$PYTHON" -m pip install --help 2>/dev/null)" == *--group* ]]; }

install_into_environment() {
  local group=()
  [ "$1" = demo ] || group=(--group "$1")
  say "installing Stitch and what it needs ($1) ..."
  if ! (cd "$ROOT" &&
    { [ "$1" = demo ] || has_groups || "$PYTHON" -m pip install --quiet --upgrade 'pip>=25.1' >&2; } &&
    "$PYTHON" -m pip install --quiet --editable . "${group[@]}" >&2); then
    fail "could not install Stitch's dependencies (see pip's message above)" \
      "the first run needs a package index: check the network, or set PIP_INDEX_URL" \
      "then run this again; nothing is left half done"
  fi
  printf '%s %s\n' "$1" "$(fingerprint)" >>"$MARKER.new"
  mv "$MARKER.new" "$MARKER"
}

prepare_environment() {
  is_installed "$1" && return 0
  # Clearing a link clears what it leads to: the environment of another checkout, perhaps.
  [ ! -L "$VENV" ] || fail "$VENV is a link, and what it leads to is no environment of $ROOT" \
    "remove the link, or name another place: STITCH_VENV=/path/to/environment $0"
  mkdir -p "$(dirname "$VENV")"
  # Two tools started at once must not install into one environment together.
  if command -v flock >/dev/null; then
    exec 9>"$VENV.lock" || fail "cannot write beside $VENV"
    flock 9
    is_installed "$1" && { exec 9>&-; return 0; }
  fi
  rm -f "$MARKER"
  if ! "$PYTHON" -c 'import pip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null ||
    ! grep -qsF "$VENV" "$VENV/bin/activate"; then
    create_environment
  fi
  install_into_environment "$1"
  { exec 9>&-; } 2>/dev/null || true
}
