#!/bin/sh
# A launch, unless the first word is one of the programs that are here for other uses. The shell gives way to it, so that
# it is process 1 and gets the signals itself.
case ${1-} in
elastic-launch | elasticctl | elastic-composer | torchrun | python | python3 | sh | bash) exec "$@" ;;
*) exec elastic-launch "$@" ;;
esac
