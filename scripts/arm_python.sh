#!/bin/sh
# A Python for Arm in a folder, which qemu's user mode runs: arm_python.sh FOLDER PIP TORCH.
#
# Debian's packages for arm64 are unpacked below FOLDER/root and PyPI's below FOLDER/site; neither is installed, and
# what apt knows of this machine stays as it is. FOLDER/python is then an interpreter of whoever calls it.
set -eu
folder=$1 pip=$2 torch=$3
rm -rf "$folder"
mkdir -p "$folder/apt/lists/partial" "$folder/apt/archives/partial" "$folder/root"
: >"$folder/apt/status"
apt() {
    apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User= -o Dir::State="$folder/apt" \
        -o Dir::State::status="$folder/apt/status" -o Dir::Cache="$folder/apt" -o Debug::NoLocking=1 "$@"
}
apt update
apt install --yes --download-only --no-install-recommends python3 libstdc++6 libgomp1 >/dev/null
for package in "$folder"/apt/archives/*.deb; do dpkg-deb --extract "$package" "$folder/root"; done
rm -rf "$folder/apt"
version=$(readlink "$folder/root/usr/bin/python3")
# What wheels of torch ask for is decided by the machine that runs pip, so that dependencies are named.
for packages in "--no-deps $torch" 'fsspec filelock hypothesis jinja2 networkx numpy pytest sympy typing-extensions'; do
    $pip install --target "$folder/site" --python-version "${version#python}" --only-binary=:all: \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 $packages
done
cat >"$folder/python" <<END
#!/bin/sh
exec qemu-aarch64 -cpu "\${KVLOOM_ARM_CPU:-max}" -L "$folder/root" -E LD_LIBRARY_PATH= \\
    -E PYTHONPATH="$folder/site\${PYTHONPATH:+:\$PYTHONPATH}" "$folder/root/usr/bin/$version" "\$@"
END
chmod +x "$folder/python"
