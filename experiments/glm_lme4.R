# Estimates of lme4 for one or many data sets; called by glm_lme4.py.
#
#   Rscript glm_lme4.R FILE FAMILY FORMULA REML
#
# The column `number` of FILE says which rows are a data set. Prints lines of number, what, name, value and standard error,
# separated by tabs. Generalised models with one random effect are integrated with 25 points.
suppressPackageStartupMessages(library(lme4))
arguments <- commandArgs(trailingOnly = TRUE)
data <- read.csv(arguments[1], stringsAsFactors = TRUE)
formula <- as.formula(arguments[3])
one_effect <- length(all.vars(findbars(formula)[[1]])) == 1
for (number in unique(data$number)) {
  rows <- data[data$number == number, ]
  fit <- suppressWarnings(suppressMessages(if (arguments[2] == "gaussian") {
    lmer(formula, rows, REML = as.logical(arguments[4]), control = lmerControl(optimizer = "bobyqa"))
  } else {
    glmer(formula, rows, family = arguments[2], nAGQ = if (one_effect) 25 else 1)
  }))
  show <- function(what, name, value, error = "") cat(paste(number, what, name, format(value, digits = 12), error, sep = "\t"), sep = "\n")
  show("log_likelihood", "", as.numeric(logLik(fit)))
  fixed <- coef(summary(fit))
  show("fixed", rownames(fixed), fixed[, 1], format(fixed[, 2], digits = 12))
  covariance <- VarCorr(fit)[[1]]
  show("covariance", rep(rownames(covariance), nrow(covariance)), as.vector(covariance))
  if (arguments[2] == "gaussian") show("residual", "", sigma(fit)^2)
}
