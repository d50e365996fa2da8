//! The stock worker's workables: programs that a file names, and test workables.
//!
//! | module | what it is |
//! |---|---|
//! | [`stock`] | the workables file |
//! | [`program`] | one execution of a program |
//! | [`long_lived`] | programs whose processes run many jobs |
//! | [`messages`] | what a program reports while it runs |
//! | [`template`] | its arguments |
//! | [`output`] | its output |
//! | [`orphans`] | the orphaned processes that it leaves in a container |
//! | [`files`] | the number of programs that the limit of open files allows |
//! | [`builtin`] | test workables |

pub(crate) mod builtin;
pub(crate) mod files;
pub(crate) mod long_lived;
mod messages;
pub(crate) mod orphans;
mod output;
mod program;
pub mod stock;
mod template;
