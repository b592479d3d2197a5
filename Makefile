# What a person does with this project. Every target installs what it needs (Debian 12, as root or with sudo).

CARGO ?= cargo
.PHONY: demo test test-libvirt check bench soak mutants setup install clean

PREFIX ?= /usr/local
DESTDIR ?=
SHARE = $(DESTDIR)$(PREFIX)/share

## Everything that tests and benchmarks need: QEMU 7.2, 10.0 and 11.1, a guest kernel, accel-config, QATzip and virtiofsd, under target/tools.
setup:
	scripts/setup

## Moves a real Linux guest between two QEMUs and proves that its memory is right; report in target/demo/report.json.
demo:
	scripts/setup --demo
	@echo "Building sterna (a few minutes the first time), then moving a guest ..."
	$(CARGO) build --release -p sterna-cli -p sterna-bench
	$(CARGO) run --release -p sterna-bench -- demo

## The gate: all tests whose outcome depends on the code alone (CONTRIBUTING.md). TEST_THREADS=N: so many at a time.
test: setup
	scripts/test

## `sterna proxy` under two real libvirts (Debian 12's, unpacked), with a guest that verifies its memory: needs root, takes minutes.
test-libvirt:
	scripts/setup --libvirt
	scripts/test-libvirt

## Formatting, lints, documentation, licences.
check:
	scripts/check

## The benchmarks of the documents, shortened (--quick); `sterna-bench NAME` is the long form.
bench: setup
	$(CARGO) build --release -p sterna-cli -p sterna-microvm -p sterna-bench --features sterna-cli/model,sterna-microvm/model
	for name in qemu ram received-bitmap dirty-rate bandwidth compression offload zero-page many-vms device-faults device-state; do \
		$(CARGO) run --release -p sterna-bench -- $$name --quick || exit 1; done

## Long randomised runs, and tests whose outcome depends on the moment; each prints its seed. SOAK_MINUTES=30: these tests only, for so long.
soak: setup
	scripts/soak

## Plausible mistakes in the accelerator rooms, one at a time: do the tests notice? (scripts/mutants.list)
mutants:
	scripts/mutants

## sterna, its manual pages, and what bash, zsh and fish need to complete its options, under $(DESTDIR)$(PREFIX).
install:
	$(CARGO) build --release -p sterna-cli
	install -Dm 0755 target/release/sterna $(DESTDIR)$(PREFIX)/bin/sterna
	install -d $(SHARE)/man/man1 $(SHARE)/bash-completion/completions $(SHARE)/zsh/site-functions $(SHARE)/fish/vendor_completions.d
	target/release/sterna man $(SHARE)/man/man1
	target/release/sterna completions bash >$(SHARE)/bash-completion/completions/sterna
	target/release/sterna completions zsh >$(SHARE)/zsh/site-functions/_sterna
	target/release/sterna completions fish >$(SHARE)/fish/vendor_completions.d/sterna.fish

clean:
	$(CARGO) clean
