//! The questions of `docs/benchmarks.md`, and the cells that answer them.

use super::compared::{Metric, Pair};

/// A question of the page.
pub(super) struct Question {
    pub(super) title: &'static str,
    pub(super) answers: &'static [Answer],
    /// Causes, a point each.
    pub(super) causes: &'static [&'static str],
}

/// A comparison that answers a question.
pub(super) struct Answer {
    /// The file name of its plot, without its ending.
    pub(super) plot: &'static str,
    /// The benchmark that has the cells.
    pub(super) benchmark: &'static str,
    pub(super) metric: Metric,
    /// A second figure of the same cells, without a ratio: the table only.
    pub(super) beside: Option<Metric>,
    /// The titles of the two sides.
    pub(super) names: [&'static str; 2],
    /// The sentences about the cases with a ratio below 1, and about those above; the cases follow.
    pub(super) sentence: [&'static str; 2],
    /// The conditions of the measurement, before the sentence.
    pub(super) conditions: &'static str,
    pub(super) pairs: &'static [Pair],
}

const fn pair(label: &'static str, theirs: &'static str, ours: &'static str) -> Pair {
    Pair { label, theirs, ours }
}

const fn metric(column: &'static str, title: &'static str, unit: &'static str, scale: f64, places: usize) -> Metric {
    Metric { column, title, unit, scale, places }
}

const TOTAL: Metric = metric("total_ms", "time", "s", 1e3, 2);
const DOWNTIME: Metric = metric("downtime_ms", "downtime", "ms", 1.0, 0);
const CPU: Metric = metric("cpu_seconds", "CPU", "CPU-seconds", 1.0, 2);
const GUEST_SPEED: Metric = metric("achieved", "guest's speed", "%", 0.01, 0);
const DIRTY_RATE: Metric = metric("dirty_rate", "largest dirty rate", "MB/s", 1e6, 0);
const CPU_PER_PAGE: Metric = metric("all_ns", "CPU for each page", "ns", 1.0, 0);

const ANONYMOUS: Pair =
    pair("anonymous memory", "unlimited, anonymous, QEMU none", "unlimited, anonymous, direct none");
const MEMFD: Pair = pair("memfd", "unlimited, memfd, QEMU none", "unlimited, memfd, direct none");
const HUGE: Pair = pair("huge pages", "unlimited, huge pages, QEMU none", "unlimited, huge pages, direct none");
const TLS: Pair = pair("TLS", "unlimited, anonymous, QEMU TLS", "unlimited, anonymous, direct TLS");
const SPARSE: Pair = pair("sparse guest", "sparse, QEMU none", "sparse, direct none");
const ONE_GBIT: Pair = pair("1 Gbit/s", "1 Gbit/s, QEMU zstd", "1 Gbit/s, direct auto");
const ONE_GBIT_WRITING: Pair = pair("1 Gbit/s", "1 Gbit/s, writing, QEMU zstd", "1 Gbit/s, writing, direct auto");

const QEMU_AND_DIRECT: [&str; 2] = ["QEMU alone", "Sterna, direct mode"];

/// The questions, in their order on the page.
pub(super) const QUESTIONS: &[Question] = &[
    Question {
        title: "Is it faster than QEMU alone?",
        answers: &[
            Answer {
                plot: "time",
                benchmark: "qemu",
                metric: TOTAL,
                beside: None,
                names: QEMU_AND_DIRECT,
                sentence: ["Direct mode takes **less time** than QEMU alone", "It takes **more time**"],
                conditions: "An idle guest with 1.9 GiB of memory that is not zero (the sparse one: 360 MiB of 16 GiB), a network \
                             without a limit, no compression.",
                pairs: &[ANONYMOUS, MEMFD, HUGE, TLS, SPARSE],
            },
            Answer {
                plot: "library-time",
                benchmark: "ram",
                metric: TOTAL,
                beside: None,
                names: ["QEMU alone", "Sterna, library"],
                sentence: [
                    "A program that embeds the library takes **less time** than QEMU alone",
                    "It takes **more time**",
                ],
                conditions: "The library moves memory from process to process.",
                pairs: &[
                    pair("anonymous memory", "half filled, anonymous, QEMU", "half filled, anonymous, Sterna"),
                    pair("memfd", "half filled, memfd, QEMU", "half filled, memfd, Sterna"),
                    pair("TLS", "half filled, anonymous, TLS, QEMU", "half filled, anonymous, TLS, Sterna"),
                    pair("never touched", "never touched, QEMU", "never touched, Sterna"),
                ],
            },
        ],
        causes: &[
            "Uncompressed anonymous memory is copied once more at each side: QEMU sends from guest RAM and receives into it, direct \
             mode reads and writes the memory of another process (`process_vm_readv`, `/proc/PID/mem`). Each copy costs about 0.3 \
             CPU-seconds for each GB.",
            "A memfd and shared huge pages are mapped by both sides, and nothing is copied twice.",
            "QEMU reads every page of a sparse guest, direct mode only those that the guest has touched.",
            "Stream mode carries every byte through two more sockets, and takes longer than QEMU alone. It remains for guests that \
             direct mode refuses.",
        ],
    },
    Question {
        title: "How long is the downtime?",
        answers: &[Answer {
            plot: "downtime",
            benchmark: "qemu",
            metric: DOWNTIME,
            beside: None,
            names: QEMU_AND_DIRECT,
            sentence: ["For an idle guest, direct mode's downtime is **shorter** than QEMU's", "It is **longer**"],
            conditions: "The same runs; the target downtime is 300 ms for both.",
            pairs: &[ANONYMOUS, MEMFD, HUGE, TLS, ONE_GBIT],
        }],
        causes: &[
            "If the guest dirties pages slower than they are sent, direct mode goes on sending until the rest is small; QEMU pauses \
             the guest as soon as the rest fits into the target downtime.",
            "Some ten milliseconds remain in every case: saving and loading the devices, and the commit.",
        ],
    },
    Question {
        title: "What if the guest is busy?",
        answers: &[
            Answer {
                plot: "busy-downtime",
                benchmark: "qemu",
                metric: DOWNTIME,
                beside: Some(GUEST_SPEED),
                names: QEMU_AND_DIRECT,
                sentence: [
                    "For a guest that writes, direct mode's downtime is **shorter** than QEMU's",
                    "It is **longer**",
                ],
                conditions: "The guest writes 50 MB/s of whole pages at random. Its speed during the migration is the part of that \
                             rate that it reached.",
                pairs: &[
                    pair(
                        "anonymous memory",
                        "unlimited, anonymous, writing, QEMU none",
                        "unlimited, anonymous, writing, direct none",
                    ),
                    pair("memfd", "unlimited, memfd, writing, QEMU none", "unlimited, memfd, writing, direct none"),
                    pair(
                        "huge pages",
                        "unlimited, huge pages, writing, QEMU none",
                        "unlimited, huge pages, writing, direct none",
                    ),
                    ONE_GBIT_WRITING,
                ],
            },
            Answer {
                plot: "dirty-rate",
                benchmark: "dirty-rate",
                metric: DIRTY_RATE,
                beside: Some(GUEST_SPEED),
                names: ["QEMU alone, its best method", "Sterna, direct mode"],
                sentence: [
                    "The largest rate at which a guest may write and still be moved is **lower** with direct mode",
                    "With direct mode the largest rate at which a guest may write and still be moved is **higher**",
                ],
                conditions: "A limit of 32 MiB/s, 32 s, and a downtime of 330 ms at most.",
                pairs: &[
                    pair(
                        "pages of a sequence",
                        "32 MiB/s, QEMU guest, QEMU zstd, sequence",
                        "32 MiB/s, QEMU guest, direct auto and deltas, sequence",
                    ),
                    pair(
                        "words in random pages",
                        "32 MiB/s, QEMU guest, QEMU xbzrle, random words",
                        "32 MiB/s, QEMU guest, direct auto and deltas, random words",
                    ),
                    pair(
                        "pages of ones",
                        "32 MiB/s, QEMU guest, QEMU zstd, ones",
                        "32 MiB/s, QEMU guest, direct auto and deltas, ones",
                    ),
                ],
            },
        ],
        causes: &[
            "Direct mode's write protection costs the guest a page fault for each page that it writes in a round. An emulated guest, as \
             here, does not have that cost with QEMU's own dirty log. Under KVM QEMU write-protects pages, too; that was not measured.",
        ],
    },
    Question {
        title: "And on a slow network?",
        answers: &[
            Answer {
                plot: "slow-network",
                benchmark: "qemu",
                metric: TOTAL,
                beside: None,
                names: QEMU_AND_DIRECT,
                sentence: [
                    "On 1 Gbit/s, direct mode with `auto` takes **less time** than QEMU alone",
                    "It takes **more time**",
                ],
                conditions: "A guest with 415 MiB of memory that is not zero; one CPU for each side. QEMU sends without compression, or with zstd.",
                pairs: &[
                    pair("QEMU's none", "1 Gbit/s, QEMU none", "1 Gbit/s, direct auto"),
                    pair("QEMU's zstd", "1 Gbit/s, QEMU zstd", "1 Gbit/s, direct auto"),
                    pair("zstd and a busy guest", "1 Gbit/s, writing, QEMU zstd", "1 Gbit/s, writing, direct auto"),
                ],
            },
            Answer {
                plot: "compression",
                benchmark: "compression",
                metric: TOTAL,
                beside: None,
                names: ["zstd alone", "auto"],
                sentence: ["On 1 Gbit/s, `auto` takes **less time** than zstd at level 1", "It takes **more time**"],
                conditions: "The library, two channels, real content.",
                pairs: &[
                    pair("mixed", "1 Gbit/s, mixed, zstd × 2", "1 Gbit/s, mixed, auto × 2"),
                    pair("text", "1 Gbit/s, text, zstd × 2", "1 Gbit/s, text, auto × 2"),
                    pair("images", "1 Gbit/s, images, zstd × 2", "1 Gbit/s, images, auto × 2"),
                    pair("guest RAM", "1 Gbit/s, guest-ram, zstd × 2", "1 Gbit/s, guest-ram, auto × 2"),
                    pair("memcached", "1 Gbit/s, memcached, zstd × 2", "1 Gbit/s, memcached, auto × 2"),
                ],
            },
        ],
        causes: &[
            "Where the CPU is the bottleneck, `auto` sends some pages uncompressed to keep the network busy. With one CPU for each \
             side, zstd at level 1 needs about two thirds of it to fill 1 Gbit/s.",
        ],
    },
    Question {
        title: "How much CPU does it take?",
        answers: &[Answer {
            plot: "cpu",
            benchmark: "qemu",
            metric: CPU,
            beside: None,
            names: QEMU_AND_DIRECT,
            sentence: [
                "Direct mode, with QEMU's own threads, takes **less CPU** of both sides than QEMU alone",
                "It takes **more CPU**",
            ],
            conditions: "The same runs.",
            pairs: &[ANONYMOUS, MEMFD, HUGE, TLS, ONE_GBIT],
        }],
        causes: &[
            "On anonymous memory the second copy, at both sides, is the cause.",
            "The rest of Sterna's CPU is TCP, checksums and the zero test (0.06 CPU-seconds for each GB at each side), and, at the \
             destination, the first touch of each page.",
        ],
    },
    Question {
        title: "What do accelerators bring?",
        answers: &[Answer {
            plot: "accelerators",
            benchmark: "offload",
            metric: CPU_PER_PAGE,
            beside: None,
            names: ["CPU alone", "with one DSA"],
            sentence: [
                "**No accelerator was available for measurements.** With a stand-in, the search for zero pages takes **less CPU** with a device",
                "It takes **more CPU**",
            ],
            conditions: "The product's own code over a stand-in that answers from a table; the CPU's further cost of a real device \
                         (`ENQCMD`, reading records) is added from published figures. Uncached memory, batches of 512 pages.",
            pairs: &[
                pair("all pages zero", "cpu, cold, all zero: scan", "device, all zero: batches of 512"),
                pair("every second page", "cpu, cold, mixed: scan", "device, mixed: batches of 512"),
                pair("no page zero", "cpu, cold, all normal: scan", "device, all normal: batches of 512"),
            ],
        }],
        causes: &[
            "The CPU's scan stops at the first word that is not zero: for normal pages a device saves nothing.",
            "The gain of whole migrations, also of a hundred at once, is simulated: [benchmarks-simulated.md](benchmarks-simulated.md).",
        ],
    },
];

#[cfg(test)]
mod tests {
    use super::QUESTIONS;
    use crate::BENCHMARKS;

    #[test]
    fn every_answer_names_cells_that_its_benchmark_has() {
        for answer in QUESTIONS.iter().flat_map(|question| question.answers) {
            let benchmark = BENCHMARKS.iter().find(|benchmark| benchmark.name == answer.benchmark).unwrap();
            let cells = (benchmark.cells)();
            for cell in answer.pairs.iter().flat_map(|pair| [pair.theirs, pair.ours]) {
                assert!(cells.iter().any(|name| name == cell), "{} has no cell '{cell}'", benchmark.name);
            }
            assert!((3..=5).contains(&answer.pairs.len()), "three to five rows: {}", answer.plot);
        }
    }

    #[test]
    fn each_plot_has_a_name_of_its_own() {
        let mut plots: Vec<_> =
            QUESTIONS.iter().flat_map(|question| question.answers).map(|answer| answer.plot).collect();
        plots.sort_unstable();
        let all = plots.len();
        plots.dedup();
        assert_eq!(plots.len(), all);
    }
}
