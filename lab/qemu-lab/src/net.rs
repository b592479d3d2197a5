//! Two hosts on one machine: two network namespaces joined by a virtual cable with a given rate and delay. Needs root and iproute2.

use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::Error;
use crate::error::run;

/// Rate and delay of the cable. The default limits nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Link {
    /// Bits a second in each direction (a token bucket); `None`: as fast as the machine.
    pub bits_per_second: Option<u64>,
    /// Delay in each direction; needs the kernel's netem.
    pub delay: Option<Duration>,
}

/// Two network namespaces, removed when this is dropped. Processes that still run in them lose their network.
#[derive(Debug)]
pub struct Network {
    names: [String; 2],
}

impl Network {
    /// The address of host A.
    pub const ADDRESS_A: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
    /// The address of host B.
    pub const ADDRESS_B: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

    /// Makes two namespaces with a cable between them. Each network is separate from all others, so all use the same
    /// addresses (of the block reserved for documentation).
    ///
    /// # Errors
    /// [`Error::Unavailable`] if this user may not make namespaces or the kernel lacks a feature.
    pub fn new(link: Link) -> Result<Network, Error> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let unavailable =
            |error: Error| Error::Unavailable { what: "a network of two namespaces".into(), reason: error.to_string() };
        let process = std::process::id();
        let names = ["a", "b"].map(|side| format!("sterna-{process}-{number}-{side}"));
        ip(&["netns", "add", &names[0]]).map_err(unavailable)?;
        // From here on, dropping `network` removes what was made so far.
        let network = Network { names };
        let [a, b] = &network.names;
        ip(&["netns", "add", b]).map_err(unavailable)?;
        // Made inside the namespace, so that the names do not clash with others.
        ip(&["-n", a, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", b])
            .map_err(unavailable)?;
        for (name, address) in [(a, Self::ADDRESS_A), (b, Self::ADDRESS_B)] {
            ip(&["-n", name, "address", "add", &format!("{address}/24"), "dev", "eth0"]).map_err(unavailable)?;
            ip(&["-n", name, "link", "set", "lo", "up"]).map_err(unavailable)?;
            ip(&["-n", name, "link", "set", "eth0", "up"]).map_err(unavailable)?;
        }
        network.set_link(link).map_err(unavailable)?;
        Ok(network)
    }

    /// Changes the cable's rate and delay, also while it is in use.
    ///
    /// # Errors
    /// [`Error::Command`] if the kernel lacks a queueing discipline.
    pub fn set_link(&self, link: Link) -> Result<(), Error> {
        for name in &self.names {
            // Fails if there is none yet, which is no error.
            let _ = tc(name, "del", &["root"]);
            let mut parent = ["root", "handle", "1:"].as_slice();
            if let Some(delay) = link.delay {
                let delay = format!("{}us", delay.as_micros());
                // Enough packets in flight for 10 Gbit/s and 100 ms.
                tc(name, "add", &[parent, &["netem", "delay", &delay, "limit", "100000"]].concat())?;
                parent = &["parent", "1:", "handle", "2:"];
            }
            if let Some(rate) = link.bits_per_second {
                // A burst of 2 ms, but at least a few of the stack's segments of 64 KiB.
                let burst = (rate / 8 / 500).max(256 << 10).to_string();
                tc(
                    name,
                    "add",
                    &[parent, &["tbf", "rate", &format!("{rate}bit"), "burst", &burst, "latency", "50ms"]].concat(),
                )?;
            }
        }
        Ok(())
    }

    /// Returns the namespace of host A.
    #[must_use]
    pub fn a(&self) -> &str {
        &self.names[0]
    }

    /// Returns the namespace of host B.
    #[must_use]
    pub fn b(&self) -> &str {
        &self.names[1]
    }

    /// Disconnects the cable, or connects it again.
    ///
    /// # Errors
    /// [`Error::Command`].
    pub fn set_up(&self, up: bool) -> Result<(), Error> {
        ip(&["-n", self.a(), "link", "set", "eth0", if up { "up" } else { "down" }])
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.names {
            // The second may never have been made.
            if let Err(error) = ip(&["netns", "delete", name]) {
                tracing::debug!(%error, "namespace not removed");
            }
        }
    }
}

/// Returns a command that runs `program` in a namespace. Arguments follow; the process is the program itself, not a wrapper.
#[must_use]
pub fn run_in(namespace: &str, program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", namespace]).arg(program);
    command
}

fn ip(words: &[&str]) -> Result<(), Error> {
    run(Command::new("ip").args(words)).map(drop)
}

fn tc(namespace: &str, action: &str, words: &[&str]) -> Result<(), Error> {
    let mut command = Command::new("tc");
    run(command.args(["-n", namespace, "qdisc", action, "dev", "eth0"]).args(words)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skip_if_unavailable;

    fn namespaces() -> String {
        run(Command::new("ip").args(["netns", "list"])).expect("ip works here")
    }

    #[test]
    fn the_hosts_reach_each_other_and_are_removed_afterwards() {
        let Some(network) = skip_if_unavailable(Network::new(Link::default())) else { return };
        let (a, b) = (network.a().to_owned(), network.b().to_owned());
        assert!(namespaces().contains(&a) && namespaces().contains(&b));
        let route = run(run_in(&a, "ip").args(["route", "get", &Network::ADDRESS_B.to_string()])).expect("a route");
        assert!(route.contains("dev eth0"), "{route}");
        drop(network);
        assert!(!namespaces().contains(&a) && !namespaces().contains(&b));
    }

    #[test]
    fn a_rate_is_set_on_both_ends() {
        let Some(network) =
            skip_if_unavailable(Network::new(Link { bits_per_second: Some(1_000_000_000), delay: None }))
        else {
            return;
        };
        for name in [network.a(), network.b()] {
            let shown =
                run(Command::new("tc").args(["-n", name, "qdisc", "show", "dev", "eth0"])).expect("tc works here");
            assert!(shown.contains("tbf") && shown.contains("1Gbit"), "{shown}");
        }
    }
}
