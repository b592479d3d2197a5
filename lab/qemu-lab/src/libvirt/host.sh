# Makes one host of two (see ../libvirt.rs) and runs its libvirtd: DIRECTORY TOOLS NAME. Runs as the first process of mount, process,
# host name and network namespaces of its own, so that everything started in them, QEMUs included, ends with it.
set -e
directory=$1 tools=$2 name=$3
# By its number outside, which this /proc still has.
read -r pid rest </proc/self/stat
echo "$pid"

mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/lab /run/qemu /run/layers
for layer in etc var; do mkdir "/run/layers/$layer" "/run/layers/$layer.work"; done
mount --bind "$directory/lab" /run/lab
mount --bind "$tools/qemu-10.0" /run/qemu
# libvirt knows its programs, drivers, configuration and state by fixed paths. What this machine's own libvirt has there, if any, is
# covered.
mount -t overlay overlay -o "lowerdir=$tools/libvirt/usr:/usr" /usr
mount -t overlay overlay -o "lowerdir=/var,upperdir=/run/layers/var,workdir=/run/layers/var.work" /var
mount -t overlay overlay -o "lowerdir=$directory/etc:/etc,upperdir=/run/layers/etc,workdir=/run/layers/etc.work" /etc
mount --bind "$directory/libvirt" /etc/libvirt
mount --bind "$directory/pki" /etc/pki
for part in lib cache log; do
    mkdir -p "/var/$part/libvirt"
    mount -t tmpfs -o mode=755 tmpfs "/var/$part/libvirt"
done
mkdir /var/lib/libvirt/images
# Guests are emulated. libvirt looks whether QEMU's user can open /dev/kvm, and where QEMU finds something else it asks QEMU for its
# capabilities again and again: so here neither can open it.
if [ -e /dev/kvm ]; then
    touch /run/layers/kvm
    chmod 0 /run/layers/kvm
    mount --bind /run/layers/kvm /dev/kvm
fi
mount -t proc proc /proc
hostname "$name"
echo mounted

env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin NOTIFY_SOCKET=/run/lab/notify /usr/sbin/libvirtd --listen >/run/lab/libvirtd.out 2>&1 </dev/null &
# The shell also takes what ended QEMUs leave: libvirt takes a process that nobody has waited for as running.
wait $!
