# Makes a container's root of this host's, with its own /dev, /proc and /tmp and the mounts that are asked for, and
# becomes the container's command. Runs as process 1 in new mount, UTS and pid namespaces.
#   enter.sh ROOT HOSTNAME HOSTS RESOLV.CONF TERMINATION-LOG [SOURCE TARGET rw|ro]... -- COMMAND...
set -e
exec 2>&1
root=$1 name=$2 hosts=$3 resolv=$4 log=$5
shift 5
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
exec chroot "$root" "$@"
