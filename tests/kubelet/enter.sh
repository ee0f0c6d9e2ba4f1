# Makes a container's root of this host's, with its own /dev, /proc and /tmp and the mounts that are asked for, and
# becomes the container's command. Runs as process 1 in new mount, UTS and pid namespaces. Mounts stay as they are asked for
# when all else is made read-only.
#   enter.sh ROOT ro|rw HOSTNAME HOSTS RESOLV.CONF TERMINATION-LOG [SOURCE TARGET rw|ro]... -- COMMAND...
set -e
exec 2>&1
root=$1 access=$2 name=$3 hosts=$4 resolv=$5 log=$6
shift 6
hostname "$name"
mount --bind "$hosts" "$(readlink -f /etc/hosts)"
mount --bind "$resolv" "$(readlink -f /etc/resolv.conf)"
mount -t tmpfs tmpfs "$root"
for entry in /*; do
    case $entry in /dev | /proc | /tmp) continue ;; esac
    if [ -L "$entry" ]; then
        cp -P "$entry" "$root/"
    elif [ -d "$entry" ]; then
        mkdir "$root$entry"
        mount --rbind "$entry" "$root$entry"
        [ "$access" = rw ] || mount -o remount,bind,ro "$root$entry"
    fi
done
mkdir "$root/dev" "$root/dev/shm" "$root/proc" "$root/tmp"
for device in null zero full random urandom; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
touch "$root/dev/termination-log"
mount --bind "$log" "$root/dev/termination-log"
mount -t proc proc "$root/proc"
while [ "$1" != -- ]; do
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    [ "$3" = rw ] || mount -o remount,bind,ro "$root$2"
    shift 3
done
shift
[ "$access" = rw ] || mount -o remount,ro "$root"
exec chroot "$root" "$@"
