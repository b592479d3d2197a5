//! A description of the machine on which figures were measured.

use serde::{Deserialize, Serialize};

/// The description.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Machine {
    cpu: String,
    cpus: usize,
    memory_bytes: u64,
    kernel: String,
    /// The load (running and runnable processes, averaged over a minute) at the start and at the end.
    load: Vec<f64>,
}

impl Machine {
    /// Describes the machine now.
    pub(crate) fn describe() -> Self {
        let field = |file: &str, name: &str| {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'));
            value.map(|value| value.trim().to_owned())
        };
        let memory = field("/proc/meminfo", "MemTotal").and_then(|text| text.strip_suffix(" kB")?.parse::<u64>().ok());
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            cpu: field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown CPU".into()),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: memory.unwrap_or(0) * 1024,
            kernel: kernel.trim().to_owned(),
            load: vec![load()],
        }
    }

    /// Adds its present load.
    pub(crate) fn add_load(&mut self) {
        self.load.push(load());
    }

    /// Returns the description in one line.
    pub(crate) fn line(&self) -> String {
        let load: Vec<String> = self.load.iter().map(|load| format!("{load:.1}")).collect();
        format!(
            "{} × {}, {:.0} GiB, Linux {}, load {}",
            self.cpus,
            self.cpu,
            self.memory_bytes as f64 / f64::from(1 << 30),
            self.kernel,
            load.join(" → ")
        )
    }
}

fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0.0)
}
