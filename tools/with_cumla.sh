#!/bin/sh
# Run a command with this checkout of cumla (and any wheels in .whl/) importable, on a machine where it is not
# installed and cannot be: no network, no virtual environment.
#
#     tools/with_cumla.sh python3 -m pytest -m gpu
set -e
site=${SITE:-$HOME/site}
pip="python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --upgrade --target $site"
if ls .whl/*.whl >/dev/null 2>&1; then $pip .whl/*.whl; fi
# Built from a copy: several builds may run at once, and a build folder would keep deleted files.
source=$(mktemp -d)
tar cf - --exclude=./build --exclude='./*.egg-info' --exclude='./.*' --exclude=./tests --exclude=./docs . | tar xf - -C "$source"
$pip --no-build-isolation "$source" >/dev/null
rm -rf "$source"
PYTHONPATH=$site:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}
if [ -d .peers ]; then # other libraries' kernels; folders may be packed
    for packed in .peers/*.tar.xz; do
        [ ! -e "$packed" ] || [ -d "${packed%.tar.xz}" ] || tar xJf "$packed" -C .peers
    done
    PYTHONPATH=$PYTHONPATH:$PWD/.peers
fi
export PYTHONPATH
export PYTHONSAFEPATH=1 # import the installed package, not the checkout
# Tests and benchmarks check results themselves, and compile sources that are wrong on purpose.
export CUMLA_TEST_KERNELS="${CUMLA_TEST_KERNELS:-0}"
exec "$@"
