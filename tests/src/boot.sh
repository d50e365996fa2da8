#!/bin/bash
# Boots systemd as process 1 of namespaces of its own and holds it until standard input ends, however its holder dies.
# Run it in a mount namespace of its own: unshare --mount --propagation private boot.sh STAGE
# STAGE is a directory, seen inside as /run/stage. Prints the process id, outside, of that systemd.
# Changes inside to /etc, /usr, /var, /run and /tmp are gone with it; the network is the machine's own.
set -euo pipefail
stage=$1 box=$1/cgroup/recruiter-test-$(basename "$1")

if [ "${2-}" != inside ]; then
    mkdir "$stage/cgroup"
    mount -t cgroup2 cgroup2 "$stage/cgroup"
    mkdir "$box"
    unshare --mount --propagation private --pid --fork --kill-child --uts --ipc "$0" "$stage" inside </dev/null &
    disown
    cat >/dev/null
    kill -KILL $! # and, by --kill-child, all that runs inside
    for _ in {1..100}; do ! grep -q 'populated 1' "$box/cgroup.events" || sleep 0.05; done
    find "$box" -depth -type d -exec rmdir {} +
    exit
fi

read -r pid _ </proc/self/stat # /proc is still the one outside
echo 0 >"$box/cgroup.procs"
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/stage && mount --bind "$stage" /run/stage
for directory in etc usr var; do
    mkdir -p "/run/overlay/$directory/"{upper,work}
    mount -t overlay -o "lowerdir=/$directory,upperdir=/run/overlay/$directory/upper,workdir=/run/overlay/$directory/work" overlay "/$directory"
done
mount -t tmpfs tmpfs /tmp
mount --bind /dev/null /dev/console # this systemd is not to reset it
mount -t proc proc /proc
mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys # nor to raise the machine's limits
umount --recursive --lazy /sys && mount -t sysfs -o ro sysfs /sys

# Of the machine's own units none is to start: only those that the test installs, and these empty targets they refer to.
mount -t tmpfs -o mode=755 tmpfs /etc/systemd
mount -t tmpfs -o mode=755 tmpfs /usr/lib/systemd/system
rm -f /usr/sbin/policy-rc.d # containers forbid packages to start services
mkdir -p /etc/systemd/system /run/systemd/system/service.d
for target in sysinit basic shutdown network-online multi-user; do
    printf '[Unit]\nDefaultDependencies=no\n' >"/run/systemd/system/$target.target"
done
# There is no journal. The file `exits` has how each service ended.
cat >/run/systemd/system/service.d/test.conf <<'END'
[Service]
StandardOutput=append:/run/stage/%n.log
ExecStopPost=+/bin/sh -c 'echo "%n $$SERVICE_RESULT $$EXIT_STATUS" >>/run/stage/exits'
END

# As after an ordinary boot: a service sees its credentials through this.
mount --make-rshared /

echo "$pid"
# shellcheck disable=SC2016
exec unshare --cgroup sh -c 'mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec "$@"' sh \
    env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    SYSTEMD_UNIT_PATH=/run/systemd/system:/etc/systemd/system:/usr/lib/systemd/system \
    SYSTEMD_GENERATOR_PATH=/run/none SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/run/none \
    /lib/systemd/systemd --system --unit=basic.target --log-target=null --show-status=no
