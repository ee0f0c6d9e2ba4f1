#!/bin/sh
# Runs elastic-launch, unless the first argument is one of the other programs. The shell execs it, so that
# it is process 1 and gets the signals itself.
case ${1-} in
elastic-launch | elasticctl | elastic-composer | torchrun | python | python3 | sh | bash) exec "$@" ;;
*) exec elastic-launch "$@" ;;
esac
