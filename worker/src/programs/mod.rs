//! The stock worker's workables: programs that a file names, and workables for trying and testing.
//!
//! | module | what it is |
//! |---|---|
//! | [`stock`] | the workables file |
//! | [`program`] | one execution of a program |
//! | [`template`] | its arguments |
//! | [`output`] | what it writes |
//! | [`orphans`] | what it leaves behind in a container |
//! | [`files`] | how many of them the limit of open files allows |
//! | [`builtin`] | workables for trying and testing |

pub(crate) mod builtin;
pub(crate) mod files;
pub(crate) mod orphans;
mod output;
mod program;
pub mod stock;
mod template;
