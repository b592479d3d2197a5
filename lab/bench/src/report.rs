//! `sterna-bench report`: writes the pages of results from committed JSON.
//!
//! The files of `docs/benchmarks/data` are what the benchmarks wrote by `--json`. `questions` has the questions of
//! `docs/benchmarks.md` and the cells that answer them, `simulated` the tables of `docs/benchmarks-simulated.md`.
//! Sentences about figures are generated from the figures, so that a new measurement cannot leave an untrue sentence
//! behind; only causes are written by hand.

mod compared;
mod page;
mod plot;
mod questions;
mod results;
mod simulated;

use std::path::{Path, PathBuf};

use results::Set;

/// Write docs/benchmarks.md, its plots and docs/benchmarks-simulated.md from docs/benchmarks/data
#[derive(Debug, clap::Args)]
pub(crate) struct ReportArgs {
    /// Write nothing, and fail if a page differs from what the data gives
    #[arg(long)]
    check: bool,
    /// Directory of the documents
    #[arg(long, value_name = "DIR", default_value = "docs")]
    directory: PathBuf,
}

/// A generated file.
#[derive(Debug)]
struct Document {
    /// Its path below the directory of documents.
    path: String,
    content: String,
}

/// Writes all pages, or checks them.
///
/// # Errors
/// The data cannot be read or understood, a file cannot be written, or, with `--check`, differs.
pub(crate) fn run(args: &ReportArgs) -> Result<(), String> {
    for Document { path, content } in documents(&args.directory)? {
        let path = args.directory.join(path);
        if args.check {
            if std::fs::read_to_string(&path).ok().as_ref() != Some(&content) {
                return Err(format!(
                    "{} is not what docs/benchmarks/data makes; run `sterna-bench report`",
                    path.display()
                ));
            }
            continue;
        }
        std::fs::write(&path, content).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    }
    Ok(())
}

fn documents(directory: &Path) -> Result<Vec<Document>, String> {
    let set = Set::read(&directory.join("benchmarks/data"))?;
    let (page, mut documents) = page::benchmarks(&set);
    documents.push(Document { path: "benchmarks.md".into(), content: page });
    documents.push(Document { path: "benchmarks-simulated.md".into(), content: simulated::page(&set) });
    Ok(documents)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_pages_and_plots_are_what_the_committed_data_makes() {
        let docs = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs"));
        let documents = documents(docs).unwrap();
        assert!(documents.len() > 2, "two pages and their plots");
        for Document { path, content } in &documents {
            let committed = std::fs::read_to_string(docs.join(path)).unwrap();
            assert!(committed == *content, "{path} differs: run `cargo run -p sterna-bench -- report`");
        }
        let mut plots: Vec<_> =
            std::fs::read_dir(docs.join("benchmarks")).unwrap().map(|entry| entry.unwrap().path()).collect();
        plots.retain(|path| path.extension().is_some_and(|extension| extension == "svg"));
        assert_eq!(plots.len(), documents.len() - 2, "no plot of an earlier page is left over: {plots:?}");
    }
}
