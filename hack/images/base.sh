# SPDX-License-Identifier: Apache-2.0
# Trims a fresh debootstrap tree; $1 is its root. Run by hack/localcluster/images.py.
root=$1
# The mirror was the host's; package sources are lent to each build instead.
rm -f "$root"/etc/apt/sources.list
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* "$root"/var/cache/debconf/*-old "$root"/var/log/*.log "$root"/var/log/apt
find "$root"/usr/share/doc -mindepth 1 ! -name copyright ! -type d -delete
rm -rf "$root"/usr/share/man/* "$root"/usr/share/info/* "$root"/usr/share/locale/*
printf 'path-exclude=/usr/share/man/*\npath-exclude=/usr/share/locale/*\npath-exclude=/usr/share/doc/*\npath-include=/usr/share/doc/*/copyright\n' \
    >"$root"/etc/dpkg/dpkg.cfg.d/slim
printf 'APT::Install-Recommends "false";\nAcquire::Languages "none";\n' >"$root"/etc/apt/apt.conf.d/20slim
rm -f "$root"/etc/hostname "$root"/etc/resolv.conf
