//! Files of TOML that people write: reading one, and where in it something is wrong.
//!
//! Used for the settings of the three programs, the workables of the worker, and the schedules of `recruiter schedules apply`.

use std::{
    fs::File,
    io::{self, Read as _},
    ops::Range,
    path::{Path, PathBuf},
};

use serde::de::DeserializeOwned;
use toml::Spanned;

/// The largest file that is read, in bytes.
const LARGEST: u64 = 16 * 1024 * 1024;

/// A file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The file cannot be read.
    #[error("cannot read {what} `{}`", path.display())]
    Unreadable {
        /// What the file is.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The content of the file is invalid.
    #[error("{}:{line}:{column}: {problem}", path.display())]
    Wrong {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column, from 1, in characters.
        column: usize,
        /// The problem and its remedy.
        problem: String,
    },
}

/// A problem at these bytes of a text, and its remedy.
#[derive(Debug)]
pub struct Problem(pub Range<usize>, pub String);

impl Problem {
    /// A problem with this value or key.
    pub fn of<T>(place: &Spanned<T>, problem: impl ToString) -> Self {
        Self(place.span(), problem.to_string())
    }

    /// The problem in the file that has this text.
    pub fn in_file(self, path: &Path, text: &str) -> FileError {
        let (line, column) = place(text, self.0.start);
        FileError::Wrong { path: path.into(), line, column, problem: self.1 }
    }
}

/// The text is no TOML, or not what is expected.
impl From<toml::de::Error> for Problem {
    fn from(error: toml::de::Error) -> Self {
        let problem = error.message().replace("unknown field", "unknown key").replace("missing field", "missing key");
        Self(error.span().unwrap_or_default(), problem)
    }
}

/// The line and the column of a byte, from 1.
pub(super) fn place(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

/// The value that a text of TOML describes.
///
/// # Errors
/// The first problem.
pub fn parse<T: DeserializeOwned>(text: &str) -> Result<T, Problem> {
    toml::from_str(text).map_err(Problem::from)
}

/// Reads a file and understands its text. `what` says in errors what the file is.
///
/// # Errors
/// When the file cannot be read, is too large or no UTF-8, or is not understood.
pub fn read<T>(what: &'static str, path: &Path, understand: impl FnOnce(&str) -> Result<T, Problem>) -> Result<T, FileError> {
    let text = text_of(what, path)?;
    understand(&text).map_err(|problem| problem.in_file(path, &text))
}

pub(super) fn text_of(what: &'static str, path: &Path) -> Result<String, FileError> {
    let unreadable = |source| FileError::Unreadable { what, path: path.into(), source };
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_end(&mut bytes)).map_err(unreadable)?;
    if read as u64 > LARGEST {
        return Err(unreadable(io::Error::other("it is larger than 16 MiB")));
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let text = String::from_utf8_lossy(&error.as_bytes()[..valid]);
        Problem(valid..valid, "this is no UTF-8: save the file as UTF-8".into()).in_file(path, &text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_says_why_and_where() {
        let directory = std::env::temp_dir().join(format!("recruiter-toml-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let said = |path: &Path| {
            let error = text_of("the file", path).expect_err("it cannot be read");
            crate::base::causes(&error).join(": ")
        };
        assert!(said(&directory).contains("Is a directory"), "{}", said(&directory));
        assert!(said(Path::new("/nowhere/a.toml")).starts_with("cannot read the file `/nowhere/a.toml`: No such file"));
        let file = directory.join("a.toml");
        std::fs::write(&file, b"a = 1\n\xc3\xa4 = \xff\n").unwrap();
        assert!(said(&file).ends_with("a.toml:2:5: this is no UTF-8: save the file as UTF-8"), "{}", said(&file));
        File::create(&file).unwrap().set_len(LARGEST + 1).unwrap();
        assert!(said(&file).contains("larger than 16 MiB"), "{}", said(&file));
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
